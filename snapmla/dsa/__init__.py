"""DeepSeek's sparse attention: what chooses the tokens that sparse decode attends to."""
