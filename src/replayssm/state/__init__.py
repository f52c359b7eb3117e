"""Where the state lives: layout (sizes), pool (tensors), slots (ownership), cursor (counters), formats, snapshot."""
