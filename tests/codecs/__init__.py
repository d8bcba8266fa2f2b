"""Tests of the codecs, as a user calls them."""
