"""Models larger than memory: layers that are read from the file for each pass. See docs/streaming.md."""
