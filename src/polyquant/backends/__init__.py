"""One module or folder per array library: all that the layers above need of it."""
