"""How blobs spread from peer to peer: who has what is announced, and everybody serves what it has. Knows no weights."""
