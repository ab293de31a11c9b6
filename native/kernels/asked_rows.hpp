// The rows of a step that the last layer's queries and MLP compute: rows with requested logits. The last layer computes
// only keys and values of the other rows, which later steps read; in a prefill these are most rows.
//
//   R1  For each sequence the rows from the first requested row to its last: a batch's queries are the end of its
//       context.
//   R2  Does not own the step's batch, which must outlive it; its own batch uses copies.
//
// Cost: one pass over the rows, a copy of the block tables of sequences with requested rows.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/attention.hpp"

namespace quire {

class LogitRows {
  public:
    // `logit_rows` [num_logits] lie in [0, rows), `rows` being those of the batch.
    LogitRows(const AttentionBatch& batch, std::int64_t rows, const std::int64_t* logit_rows, std::int64_t num_logits);

    std::int64_t count() const { return static_cast<std::int64_t>(rows_.size()); }
    std::int64_t operator[](std::int64_t i) const { return rows_[static_cast<std::size_t>(i)]; }  // rising
    // Index of a row of the step among them; -1: its logits are not requested.
    std::int64_t index_of(std::int64_t row) const { return index_[static_cast<std::size_t>(row)]; }
    // Their queries.
    const AttentionBatch& batch() const { return *batch_; }

  private:
    std::vector<std::int64_t> rows_;
    std::vector<std::int32_t> index_;  // [rows of the step]
    std::vector<std::int32_t> query_start_, context_lengths_, block_tables_;
    std::optional<AttentionBatch> batch_;
};

}  // namespace quire
