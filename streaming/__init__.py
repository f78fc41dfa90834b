"""What to decode, when, and which words are settled."""
