"""The report's page: markup, style and script, filled in by `hybrid.compare.report`."""
