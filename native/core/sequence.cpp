// See sequence.hpp.
#include "core/sequence.hpp"

#include <utility>

namespace quire {

void SequenceTable::ensure_room() {
    if (2 * (size_ + 1) <= slots_.size()) return;
    std::vector<Slot> bigger(slots_.empty() ? 16 : 2 * slots_.size());
    std::swap(bigger, slots_);
    for (Slot& slot : bigger) {
        if (slot.sequence == nullptr) continue;
        --size_;
        insert(std::move(slot.sequence));
    }
}

void SequenceTable::insert(std::unique_ptr<Sequence> sequence) noexcept {
    std::size_t at = home(sequence->id);
    while (slots_[at].sequence != nullptr) at = next(at);
    slots_[at].id = sequence->id;
    slots_[at].sequence = std::move(sequence);
    ++size_;
}

void SequenceTable::erase(SequenceId id) noexcept {
    std::size_t hole = home(id);
    while (slots_[hole].id != id) hole = next(hole);
    slots_[hole] = Slot{};
    --size_;
    // Close the gap: a later entry moves into it unless its own home lies after the gap.
    for (std::size_t at = next(hole); slots_[at].sequence != nullptr; at = next(at)) {
        const std::size_t wanted = home(slots_[at].id);
        const bool stays = hole < at ? (wanted > hole && wanted <= at) : (wanted > hole || wanted <= at);
        if (stays) continue;
        slots_[hole] = std::move(slots_[at]);
        slots_[at] = Slot{};
        hole = at;
    }
}

}  // namespace quire
