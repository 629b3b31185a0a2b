# shellcheck shell=bash disable=SC2034 # the jobs read these
# Settings that both jobs and submit.sh read from the folder in which they are submitted. Edit them, and the #SBATCH lines.
export PATH=/opt/slipstream/bin:$PATH # of the virtual environment, on every node
config=run.yaml                       # the run's file; its transport.keys is `keys`
node=NODE                             # the node that has run_dir, as in --nodelist
endpoint=tcp://NODE:5557              # transport.endpoint of the run's file
trainer_gpu=0                         # what --gpu takes: 0,1 for two ranks on a node; cpu
producer_gpu=0
trainer_job=slipstream-trainer # the --job-name of trainer.sbatch
