"""Doors for models of other libraries. Nothing here is imported with the package, and no library by importing this."""
