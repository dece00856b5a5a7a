"""Runs compared: statistics, and the report that shows them."""
