"""Shapes and types of the package are checked while its tests run; hypothesis repeats itself."""

from hypothesis import settings
from jaxtyping import install_import_hook

from tests import typechecks

install_import_hook("hybrid", f"{typechecks.__name__}.checked")

settings.register_profile("repeatable", derandomize=True, max_examples=25, deadline=None, database=None)
settings.load_profile("repeatable")
