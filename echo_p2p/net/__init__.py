"""How peers reach each other: three seams (`base`), an in-memory network and the two real stacks."""
