"""How the attention calls inside a module or a block are found and sent through the engine."""
