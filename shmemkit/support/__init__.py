"""What all rooms use: settings and checks of arguments, messages, what ranks agree on,
timeouts, arrays as users give them."""
