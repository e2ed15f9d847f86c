"""Tests that kill processes at chosen messages of a request and compare the client's answer."""
