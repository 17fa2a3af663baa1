"""Commands: ``python -m openrlhf_like.cli.<command>``. Each parses, validates, and calls one pipeline function."""
