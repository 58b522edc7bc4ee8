"""The doctor in the tasks of a step: four tiers, each only if the one before is sound.

rank            what each rank does: its report, links, import of torch, collectives
leader          rank 0: it gathers the reports of a tier, judges them, and tells the others whether to continue
follower        another rank: it reports and does what it is told
report_channel  how reports and instructions pass between rank 0 and the others
report_folder   files for what can't be sent
tcp_connect     how connections are tried, and in which way they fail
fingerprint     tier 1: what each rank reads for the comparison
comparison      tier 1: what differs between ranks
absent_ranks    which ranks are missing, doubled or cut off
links           tier 2: connections between nodes
ddp_step        tiers 3 and 4: collectives, and a step of DDP
judgement       tiers 2 to 4: what rank 0 says of the figures measured there
"""
