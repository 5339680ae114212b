"""The tier behind the disk: servers that several machines share."""
