"""The command line's commands; `jzero.__main__` lists them."""
