"""One module or folder per array library; the only places that name it."""
