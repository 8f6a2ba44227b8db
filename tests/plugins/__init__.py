"""Tests of the plug-ins."""
