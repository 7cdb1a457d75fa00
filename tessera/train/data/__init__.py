# SPDX-License-Identifier: Apache-2.0
"""The data of a training run: text or synthetic tokens in shuffled batches of rows.

data_config    the settings
files          finds files
hub_files      finds files of a data set of the Hub
file_ranges    cuts files into train and validation, and into parts for workers
records        reads the texts or conversations of a part
record_values  checks texts, conversations, prompts and pairs of answers
table_files    reads columns of Parquet files
tokenization   text -> ids and back
tokenizer_folder
               special tokens and chat template, as Hugging Face stores them
chat_template  conversations -> text, and where the answers are
template_process, worker_process
               templates and readers in processes of limited memory and time
chat_prompts   conversations that a model answers
text_stream    text from tokens that arrive one by one
vocabulary     checks ids against the model's vocabulary
encoding       records -> ids
optional_libraries
               imports extras
synthetic      generates ids without text
packing        documents -> one token stream -> rows
conversation_rows
               conversations -> rows, each of them whole
record_rows    pairs of answers, and prompts -> rows, each of them whole
prompts        prompts in the order of training, for rollouts
shards         tokens in files, with checksums
preparation    makes the files that are missing, in several processes
batches        rows -> batches, by grain
corpus         loads all of it: ``load``
cursor         the position in the data, for checkpoints
sampler        indices by epoch and process, for custom data sets
"""

from tessera._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
