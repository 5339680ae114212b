"""What tokens say: bytes to text, thoughts, the parts of an answer."""
