"""Experts that are spread over ranks, and the 1F1B schedule that hides their exchange."""
