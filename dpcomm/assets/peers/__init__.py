"Contestants of `dpcomm bench`, each a script that its own Python runs."
