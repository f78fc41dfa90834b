"""The commands of ``senseway``, one module each: what its flags are and what it does. Knows no protocol details."""
