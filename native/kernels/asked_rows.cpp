#include "kernels/asked_rows.hpp"

namespace quire {

LogitRows::LogitRows(const AttentionBatch& batch, std::int64_t rows, const std::int64_t* logit_rows, std::int64_t num_logits)
    : index_(static_cast<std::size_t>(rows), -1), query_start_{0} {
    for (std::int64_t i = 0; i < num_logits; ++i) index_[static_cast<std::size_t>(logit_rows[i])] = 0;
    for (std::int64_t s = 0; s < batch.num_sequences; ++s) {
        const std::size_t before = rows_.size();
        for (std::int64_t row = batch.query_start[s]; row < batch.query_start[s + 1]; ++row) {
            std::int32_t& index = index_[static_cast<std::size_t>(row)];
            if (index < 0 && rows_.size() == before) continue;
            index = static_cast<std::int32_t>(rows_.size());
            rows_.push_back(row);
        }
        if (rows_.size() == before) continue;
        query_start_.push_back(static_cast<std::int32_t>(rows_.size()));
        context_lengths_.push_back(batch.context_lengths[s]);
        const std::int32_t* table = batch.block_tables + s * batch.table_width;
        block_tables_.insert(block_tables_.end(), table, table + batch.table_width);
    }
    batch_.emplace(query_start_.data(), context_lengths_.data(), block_tables_.data(), static_cast<std::int64_t>(context_lengths_.size()),
                   batch.table_width, batch.num_threads, batch.share_prefixes);
}

}  // namespace quire
