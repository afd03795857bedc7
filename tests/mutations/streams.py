"""Streams: their order, their places, and what they refuse."""

from __future__ import annotations

from tests.mutations import Mutation

MUTATIONS = [
    Mutation(
        promise="a stream that is resumed repeats no token of a document",
        path="streams/packing.py",
        old="self._document, self._offset, self._place = document, offset, place",
        new="self._document, self._offset, self._place = document, 0, place",
        test="tests/streams/test_packing.py::test_no_token_is_lost_or_repeated_at_any_place",
    ),
    Mutation(
        promise="packing keeps the tokens of a document that are beyond the end of a pack",
        path="streams/packing.py",
        old="            self._offset += len(part)\n",
        new="            self._offset = len(self._document)\n",
        test="tests/streams/test_packing.py::test_packs_are_not_views_of_a_document",
    ),
    Mutation(
        promise="the padding of a pack is not counted as tokens",
        path="streams/packing.py",
        old='"num_tokens": num_tokens}',
        new='"num_tokens": self._length}',
        test="tests/streams/test_packing.py::"
        "test_a_sample_is_an_array_of_int64_and_the_number_of_its_tokens",
    ),
    Mutation(
        promise="a mixture keeps the proportions of its weights",
        path="streams/mixture.py",
        old="behind = self._slack * (weight * turn - count * self._total)",
        new="behind = self._slack * (weight * turn - count)",
        test="tests/streams/test_mixture.py::"
        "test_two_components_are_within_half_a_sample_and_many_within_one",
    ),
    Mutation(
        promise="a component of a mixture that is passed over is passed over once",
        path="streams/mixture.py",
        old="part.skip(count - part.num_read)",
        new="part.skip(max(0, count - part.num_read - 1))",
        test="tests/streams/test_mixture.py::test_a_shard_continues_at_any_place",
    ),
    Mutation(
        promise="a weight of a mixture that is a float counts as its decimal number",
        path="streams/mixture.py",
        old="else repr(float(weight)))",
        new="else float(weight))",
        test="tests/streams/test_mixture.py::test_floats_are_the_decimal_numbers_they_print_as",
    ),
    Mutation(
        promise="a mixture that stops at the first end does not go on with the others",
        path="streams/mixture.py",
        old="        self._left = []\n",
        new="        super()._end(turn)\n",
        test="tests/streams/test_mixture.py::"
        "test_a_shard_ends_with_the_first_component_whose_turn_finds_nothing",
    ),
    Mutation(
        promise="a shuffled shard has another order in each epoch",
        path="streams/shuffled.py",
        old='("shuffled", self._seed, epoch, shard)',
        new='("shuffled", self._seed, shard)',
        test="tests/streams/test_shuffled.py::"
        "test_epochs_shards_and_seeds_have_orders_of_their_own",
    ),
    Mutation(
        promise="a shuffled shard that is resumed reads two blocks again and not all",
        path="streams/shuffled.py",
        old="        place = self._source.state_dict()\n        inner =",
        new="        place = self._place\n        inner =",
        test="tests/streams/test_shuffled.py::test_two_blocks_are_read_again_at_most",
    ),
    Mutation(
        promise="the seed of a shuffle belongs to what identifies a stream",
        path="streams/shuffled.py",
        old='digest("shuffled", fingerprint_of(stream), self._size, self._seed)',
        new='digest("shuffled", fingerprint_of(stream), self._size)',
        test="tests/streams/test_shuffled.py::"
        "test_the_fingerprint_covers_the_source_and_the_settings",
    ),
    Mutation(
        promise="files are shuffled anew in each epoch",
        path="streams/files.py",
        old='permutation(len(self._files), "files", self._seed, epoch)',
        new='permutation(len(self._files), "files", self._seed)',
        test="tests/streams/test_files.py::"
        "test_each_epoch_shuffles_the_files_anew_and_the_seed_decides_how",
    ),
    Mutation(
        promise="a stream of files that is resumed leaves out the samples it has read",
        path="streams/files.py",
        old="        self._file, self._place, self._samples = file, place, None\n",
        new="        self._file, self._place, self._samples = file, None, None\n",
        test="tests/streams/test_files.py::test_files_before_the_place_are_not_opened",
    ),
    Mutation(
        promise="every file belongs to one shard",
        path="streams/files.py",
        old="self._files[i] for i in order[shard::num_shards].tolist()",
        new="self._files[i] for i in order[:: num_shards - shard].tolist()",
        test="tests/streams/test_files.py::"
        "test_a_shard_continues_at_any_place_and_all_shards_are_all_samples",
    ),
    Mutation(
        promise="a cursor that was moved by a state counts from there",
        path="streams/cursor.py",
        old="(of_shard)\n            self.num_read = num_read\n",
        new="(of_shard)\n",
        test="tests/streams/test_files.py::"
        "test_a_cursor_that_returned_by_a_state_counts_from_there",
    ),
    Mutation(
        promise="data that has become shorter is an error and not the end of the epoch",
        path="streams/cursor.py",
        old="                if next(self._shard, _END) is _END:\n",
        new="                if next(self._shard, None) is _END:\n",
        test="tests/streams/test_files.py::test_a_file_that_has_become_shorter_is_recognised",
    ),
    Mutation(
        promise="the first member of the next sample of a tar file is kept",
        path="streams/tar.py",
        old="        first = self._met or next(self._members)\n",
        new="        first = next(self._members)\n",
        test="tests/streams/test_tar.py::test_samples_are_those_of_webdataset",
    ),
    Mutation(
        promise="each reading of a dataset with a state begins at its first sample",
        path="streams/stateful.py",
        old="dataset = copy.deepcopy(self._datasets[shard])",
        new="dataset = self._datasets[shard]",
        test="tests/streams/test_stateful.py::test_a_list_of_datasets_is_not_used_up",
    ),
    Mutation(
        promise="a dataset of Hugging Face that cannot be divided exactly is refused",
        path="streams/huggingface.py",
        old="hf_datasets.refusal(step, self.num_shards)",
        new="hf_datasets.refusal(step, 1)",
        test="tests/streams/test_huggingface.py::"
        "test_what_cannot_be_divided_exactly_is_refused_by_name",
    ),
]
