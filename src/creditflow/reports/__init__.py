"""Tables, figures and reports of recorded runs. Trains nothing and changes no run."""
