"""The version, in a file of its own so that the build reads it without importing anything."""

VERSION = "0.3.0"
