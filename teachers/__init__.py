"""Teachers: anything that can say how likely it finds a student's tokens. Knows nothing of `hybrid`."""
