"""What Echo peers say to each other, and the two sync protocols. No socket, no clock, no torch."""
