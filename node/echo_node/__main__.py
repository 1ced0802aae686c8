"""`python -m echo_node` is `echo-node`."""

from echo_node.cli import main

if __name__ == "__main__":
    main()
