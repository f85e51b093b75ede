"""Entries, keys and tables that are kept between searches."""
