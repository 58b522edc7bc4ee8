"""The doctor in the tasks of a step: four tiers, each only if the one before is sound.

leader_follower   what rank 0 (the leader) and the others (followers) do, tier by tier
rank              which rank this is, and what each does: its report, links, import of torch, collectives
report_channel    how reports and instructions pass between rank 0 and the others
report_folder     files for what can't be sent
connecting        how connections are tried, and in which way they fail
fingerprint       tier 1: what each rank reads for the comparison
comparison        tier 1: which ranks are missing or doubled, and what differs between ranks
links             tier 2: connections between nodes
collective_tests  tiers 3 and 4: collectives, and a step of DDP
judgement         tiers 2 to 4: what rank 0 says of the figures measured there
"""
