"""Accuracy checks that run against a live server, and the tasks that they ask."""
