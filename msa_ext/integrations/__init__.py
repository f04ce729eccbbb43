"""Other people's models on `msa_ext`; each module imports its framework only when it is used."""
