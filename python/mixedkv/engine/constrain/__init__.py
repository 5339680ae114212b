"""What an answer may say: schemas, grammars, tools, as masks over tokens."""
