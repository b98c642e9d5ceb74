"""Measuring: what a GPU allows, and what the layers take."""
