"""What a rank does, from its start to its verdict. Importing this package costs nothing: signals are heard before torch is."""
