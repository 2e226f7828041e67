"A Flower app over dpcomm."
