"""Plug-ins for Compressor: each module holds the class that an entry point of pyproject.toml names."""
