// Messages between two processes of one host through memory that they share; bmt_kernels/messages.py explains them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/bindings.h"
#include "cpu/counter.h"

#if defined(__linux__)

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "common/table.h"

namespace bmt {
namespace messages {

namespace py = pybind11;

constexpr int64_t kPage = 4096;
constexpr int64_t kBell = 64;            // where a process's bell lies in its memory
constexpr int64_t kMailboxes = 256;      // where its mailboxes begin
constexpr uint32_t kEntries = 4096;      // of a mailbox: messages to one process that it has not received
constexpr int64_t kPiece = 256 << 10;    // bytes that are copied at a time
constexpr int64_t kWindow = 8 * kPiece;  // bytes of a message under way, if there is no room for all of it
constexpr int64_t kKept = 64 << 20;      // bytes that stay with the process when messages are gone, of all its groups
constexpr int kAny = -1;

// kComing is the sender's, and only after kWanted: the data goes into the window.
enum State : uint32_t { kSent = 1, kWanted = 2, kComing = 3, kReceived = 4, kRefused = 5 };

// A message, in the memory of its sender. What each side writes lies on a cache line of its own.
struct alignas(128) Entry {
  // By the sender:
  std::atomic<int64_t> written;  // bytes
  int64_t tag, size;
  int64_t place, room;  // byte i lies at place + i % room; room 0: the window, when the receiver wants the message
  // By the receiver, from kSent on, but for kComing:
  alignas(64) std::atomic<uint32_t> state;
  std::atomic<int64_t> read;
  int64_t expected;  // bytes, if it refuses the message
};
static_assert(std::atomic<int64_t>::is_always_lock_free && sizeof(Entry) == 128, "processes share entries");

// From one process to another; in the memory of the sender. Message i has the entry order[i % kEntries], and may keep
// it for longer than later messages keep theirs. The i-th entry that the receiver gives back is freed[i % kEntries].
//
// Nothing in these rings is overwritten before it was read. The sender writes order[i % kEntries] again for message
// i + kEntries, when it has an entry for it. If the receiver had not seen message i, it would have seen none of the
// kEntries messages from i on, so all entries would be in use. The receiver writes freed[i % kEntries] again when it
// gives back the entry i + kEntries. If the sender had not read place i, it would have read none of the kEntries places
// from i on, so all entries would wait to be taken back, and the receiver would have none to give back.
struct Mailbox {
  // By the sender:
  alignas(128) std::atomic<uint32_t> sent;  // messages so far
  alignas(64) uint32_t order[kEntries];
  // By the receiver:
  alignas(64) std::atomic<uint32_t> returned;  // entries so far
  alignas(64) uint32_t freed[kEntries];
  Entry entries[kEntries];
};

enum Outcome { kArrived, kMismatch, kCancelled, kGone };

struct Finished {
  Outcome outcome;
  int peer;        // of the message
  int64_t length;  // of the message; what the receiver expects, of one that it has refused
};

struct Send {
  int64_t number;
  const char* data;
  int64_t size, tag;
  bool stage;
  Entry* entry = nullptr;
  int64_t position = 0;
};

struct Receive {
  int64_t number;
  char* data;
  int64_t size, tag;
  int source;
  Entry* entry = nullptr;
  uint64_t place = 0;  // of the message among those of its sender
  int64_t position = 0;
  bool cancelled = false;  // the data is not written any more
};

std::atomic<int64_t> kept_by_all{0};

class Messages {
 public:
  // `memories`: by rank, where each process's memory begins. Its data begins after `header` bytes: a window for each
  // process, and `stage` bytes for complete messages.
  Messages(int rank, const std::vector<int64_t>& memories, int64_t header, int64_t stage)
      : rank_(rank), size_(static_cast<int>(memories.size())), header_(header), stage_(stage) {
    for (int64_t memory : memories) memories_.push_back(address<char>(memory));
    peers_.resize(memories.size());
  }
  ~Messages() {
    kept_by_all -= kept_;
    for (const auto& peer : peers_) kept_by_all -= peer.kept;
  }

  static int64_t header_bytes(int count) {
    return (kMailboxes + count * static_cast<int64_t>(sizeof(Mailbox)) + kPage - 1) / kPage * kPage;
  }
  static int64_t data_bytes(int count, int64_t stage) { return count * kWindow + stage; }

  // Whether it is done. The caller chooses the number, which no other operation has.
  bool send(int64_t number, int64_t data, int64_t size, int peer, int64_t tag, bool stage) {
    const Locked locked(mutex_);
    Peer& to = peers_[static_cast<size_t>(peer)];
    if (!to.unsent.empty()) send_on(peer);
    Send message{number, address<const char>(data), size, tag, stage};
    if (!to.unsent.empty() || !publish(peer, message)) {
      to.unsent.push_back(message);
    } else if (message.position == size) {
      return true;
    } else {
      to.under_way.push_back(message);
    }
    pending_.insert(number);
    return false;
  }

  void receive(int64_t number, int64_t data, int64_t size, int source, int64_t tag) {
    const Locked locked(mutex_);
    const Receive receive{number, address<char>(data), size, tag, source};
    pending_.insert(number);
    const int begin = source == kAny ? 0 : source, end = source == kAny ? size_ : source + 1;
    for (int peer = begin; peer < end; ++peer) {
      look_for_new(peer);
      auto& waiting = peers_[static_cast<size_t>(peer)].unmatched;
      const auto first =
          std::find_if(waiting.begin(), waiting.end(), [&](const Arrived& each) { return each.entry->tag == tag; });
      if (first == waiting.end()) continue;
      const Arrived message = *first;
      waiting.erase(first);
      match(receive, peer, message);
      return;
    }
    posted_.push_back(receive);
  }

  // Receive and send what can be without waiting.
  void progress() {
    const Locked locked(mutex_);
    ++calls_;
    advance();
  }

  // What progress does, for a thread that calls it from time to time; nothing if others have done so since the last
  // time. Calls of send and receive do not count: they do not let other messages go on. It goes on until nothing has
  // happened for `idle` seconds, for `most` seconds, or until others call.
  void progress_alone(double idle, double most) {
    py::gil_scoped_release release;
    auto& bell = bell_of(rank_);
    const double begin = now();
    double last = begin;
    for (bool is_first = true;; is_first = false) {
      const uint32_t heard = bell.value.load(std::memory_order_acquire);
      bool advanced;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        const bool others_call = waiting_ > 0 || calls_ != calls_before_;
        if (is_first) calls_before_ = calls_;
        if (others_call || pending_.empty()) return;
        advanced = advance();
        if (pending_.empty()) return;
      }
      const double time = now();
      if (time - begin >= most) return;
      if (advanced) {
        last = time;
        continue;
      }
      if (time - last >= idle) return;
      wait_for(bell, heard + 1, 0.0, idle - (time - last));
    }
  }

  // For up to `spin` + `sleep` seconds, until the operation is done; whether it is.
  bool wait(int64_t number, double spin, double sleep) {
    py::gil_scoped_release release;
    auto& bell = bell_of(rank_);
    const double begin = now();
    double last = begin;  // when something has happened
    const Waiting waiting(*this);
    while (true) {
      const uint32_t heard = bell.value.load(std::memory_order_acquire);
      bool advanced;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        advanced = advance();
        if (pending_.count(number) == 0) return true;
      }
      const double time = now();
      if (time - begin >= spin + sleep) return false;
      if (advanced) {
        last = time;
        continue;
      }
      wait_for(bell, heard + 1, std::max(0.0, spin - (time - last)), begin + spin + sleep - time);
    }
  }

  // The data of a receive is not written any more. If its message has begun to come, the rest is dropped as it comes,
  // and the receive is done after that. Else the next receive gets the message.
  void cancel(int64_t number) {
    const Locked locked(mutex_);
    ++calls_;
    const auto has_number = [&](const Receive& each) { return each.number == number; };
    const auto posted = std::find_if(posted_.begin(), posted_.end(), has_number);
    if (posted != posted_.end()) {
      finish(number, kCancelled, posted->source, posted->size);
      posted_.erase(posted);
    }
    const auto active = std::find_if(active_.begin(), active_.end(), has_number);
    if (active == active_.end()) return;
    uint32_t wanted = kWanted;
    if (!active->entry->state.compare_exchange_strong(wanted, kSent, std::memory_order_acq_rel)) {
      active->cancelled = true;
      return;
    }
    const Receive receive = *active;
    active_.erase(active);
    finish(number, kCancelled, receive.source, receive.size);
    offer(receive.source, {receive.place, receive.entry});
  }

  // These processes send and receive no more. Messages that they have sent completely arrive. Their other messages end,
  // as do receives from any process if all others have gone.
  void lose(const std::vector<int>& ranks) {
    const Locked locked(mutex_);
    ++calls_;
    advance();
    for (int rank : ranks) peers_[static_cast<size_t>(rank)].gone = true;
    const auto has_gone = [&](int rank) { return rank == rank_ || peers_[static_cast<size_t>(rank)].gone; };
    int left = 0;
    for (int rank = 0; rank < size_; ++rank) left += !has_gone(rank);
    const auto fails = [&](const Receive& each) {
      if (each.source == kAny ? left > 0 : !has_gone(each.source)) return false;
      finish(each.number, kGone, each.source, each.size);
      return true;
    };
    posted_.remove_if(fails);
    active_.remove_if(fails);
    for (int rank : ranks) {
      Peer& peer = peers_[static_cast<size_t>(rank)];
      for (const auto& message : peer.under_way) finish(message.number, kGone, rank, message.size);
      for (const auto& message : peer.unsent) finish(message.number, kGone, rank, message.size);
      peer.under_way.clear();
      peer.unsent.clear();
    }
  }

  // What has been done and not been forgotten: number, outcome, rank of the peer, bytes.
  py::list finished() {
    std::vector<std::pair<int64_t, Finished>> all;
    {
      const Locked locked(mutex_);
      all.assign(finished_.begin(), finished_.end());
    }
    py::list result;
    for (const auto& [number, each] : all) {
      result.append(py::make_tuple(number, static_cast<int>(each.outcome), each.peer, each.length));
    }
    return result;
  }

  // The caller has noted that these are done.
  void forget(const std::vector<int64_t>& numbers) {
    const Locked locked(mutex_);
    for (int64_t number : numbers) finished_.erase(number);
  }

 private:
  // A message that has come, and its place among those of its sender.
  struct Arrived {
    uint64_t place;
    Entry* entry;
  };

  struct Peer {
    uint32_t sent = 0;                // messages to it
    uint32_t used = 0;                // entries of the mailbox to it that were ever used
    uint32_t taken_back = 0;          // entries that it has given back
    std::vector<uint32_t> free;       // entries that were used and are not in use
    uint64_t seen = 0;                // messages of it
    uint32_t returned = 0;            // entries of it that this process has given back
    std::deque<Send> unsent;          // for which there was no entry
    std::list<Send> under_way;        // that wait to be wanted, or go through the window
    const Entry* in_window = nullptr;
    int64_t kept = 0;                 // bytes of the window
    bool gone = false;
    std::list<Arrived> unmatched;     // messages of it that no receive was there for, in their order
  };

  // Whoever waits for this lock must not have the interpreter's.
  struct Locked {
    explicit Locked(std::mutex& mutex) : lock(mutex) {}
    py::gil_scoped_release release;
    std::lock_guard<std::mutex> lock;
  };

  // A thread is in wait.
  struct Waiting {
    explicit Waiting(Messages& messages) : of(messages) { count(1); }
    ~Waiting() { count(-1); }
    void count(int change) {
      const std::lock_guard<std::mutex> lock(of.mutex_);
      ++of.calls_;
      of.waiting_ += change;
    }
    Messages& of;
  };

  Counter& bell_of(int rank) { return *reinterpret_cast<Counter*>(memories_[static_cast<size_t>(rank)] + kBell); }

  // Let a process know that something has changed.
  void ring(int rank) {
    auto& bell = bell_of(rank);
    bell.value.fetch_add(1, std::memory_order_seq_cst);
    wake(bell);
  }

  Mailbox& mailbox(int from, int to) {
    return reinterpret_cast<Mailbox*>(memories_[static_cast<size_t>(from)] + kMailboxes)[to];
  }

  char* data_of(int rank) { return memories_[static_cast<size_t>(rank)] + header_; }

  void finish(int64_t number, Outcome outcome, int peer, int64_t length) {
    if (pending_.erase(number) != 0) finished_[number] = {outcome, peer, length};
  }

  bool advance() {
    bool any = false;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      any |= look_for_new(peer);
      any |= send_on(peer);
    }
    for (auto receive = active_.begin(); receive != active_.end();) {
      any |= read(*receive);
      receive = receive->position == receive->size ? end_of(receive) : std::next(receive);
    }
    return any;
  }

  // --- the sending side -------------------------------------------------------------------------

  // Put a message into the mailbox, and its data into the memory if there is room; whether there was an entry.
  bool publish(int peer, Send& message) {
    Peer& to = peers_[static_cast<size_t>(peer)];
    Mailbox& box = mailbox(rank_, peer);
    take_back_entries(peer);
    uint32_t index;
    if (!to.free.empty()) {
      index = to.free.back();  // the one that was used last is in the caches
      to.free.pop_back();
    } else if (to.used < kEntries) {
      index = to.used++;
    } else {
      return false;
    }
    box.order[to.sent % kEntries] = index;
    Entry& entry = box.entries[index];
    message.entry = &entry;
    entry.tag = message.tag;
    entry.size = message.size;
    entry.place = entry.room = 0;
    entry.read.store(0, std::memory_order_relaxed);
    entry.written.store(0, std::memory_order_relaxed);
    if (message.size > 0 && (message.stage || message.size <= kPiece)) take_place(entry);
    entry.state.store(kSent, std::memory_order_relaxed);
    const bool goes_at_once = entry.room == message.size;
    if (goes_at_once) write(message, kPiece);  // before the receiver can look, so that it looks once at a small one
    box.sent.store(++to.sent, std::memory_order_release);
    ring(peer);
    while (goes_at_once && message.position < message.size) {
      write(message, kPiece);
      ring(peer);
    }
    return true;
  }

  // Entries that the receiver has given back are free for other messages.
  void take_back_entries(int peer) {
    Peer& to = peers_[static_cast<size_t>(peer)];
    Mailbox& box = mailbox(rank_, peer);
    const uint32_t returned = box.returned.load(std::memory_order_acquire);
    for (; to.taken_back != returned; ++to.taken_back) {
      const uint32_t index = box.freed[to.taken_back % kEntries];
      Entry& entry = box.entries[index];
      if (entry.state.load(std::memory_order_relaxed) == kRefused) refused(to, peer, entry);
      if (to.in_window == &entry) leave_window(to, peer);
      staged_.remove(&entry);
      to.free.push_back(index);
    }
  }

  // Up to `most` bytes, where there is room.
  bool write(Send& message, int64_t most) {
    Entry& entry = *message.entry;
    const int64_t free = entry.room - (message.position - entry.read.load(std::memory_order_acquire));
    const int64_t count = std::min({most, free, message.size - message.position,
                                    entry.room == 0 ? 0 : entry.room - message.position % entry.room});
    if (count <= 0) return false;
    std::memcpy(data_of(rank_) + entry.place + message.position % entry.room, message.data + message.position,
                static_cast<size_t>(count));
    message.position += count;
    entry.written.store(message.position, std::memory_order_release);
    return true;
  }

  bool send_on(int peer) {
    Peer& to = peers_[static_cast<size_t>(peer)];
    bool any = false;
    if (to.in_window != nullptr && to.in_window->state.load(std::memory_order_acquire) >= kReceived) {
      leave_window(to, peer);
    }
    for (auto message = to.under_way.begin(); message != to.under_way.end();) {
      Entry& entry = *message->entry;
      uint32_t state = entry.state.load(std::memory_order_acquire);
      if (state == kRefused) {
        ++message;
        refused(to, peer, entry);
        any = true;
        continue;
      }
      // The receiver may not want it any more.
      if (state == kWanted && to.in_window == nullptr &&
          entry.state.compare_exchange_strong(state, kComing, std::memory_order_acq_rel)) {
        to.in_window = &entry;
        entry.place = peer * kWindow;
        entry.room = kWindow;
      }
      if (to.in_window == &entry) {
        for (int piece = 0; piece < 2 && write(*message, kPiece); ++piece) {
          ring(peer);
          any = true;
        }
        if (message->position == message->size) {
          finish(message->number, kArrived, peer, message->size);
          message = to.under_way.erase(message);
          continue;
        }
      }
      ++message;
    }
    while (!to.unsent.empty() && publish(peer, to.unsent.front())) {
      any = true;
      Send message = to.unsent.front();
      to.unsent.pop_front();
      if (message.position == message.size) {
        finish(message.number, kArrived, peer, message.size);
      } else {
        to.under_way.push_back(message);
      }
    }
    return any;
  }

  // The receiver expects another size: what waits to be sent fails, too.
  void refused(Peer& to, int peer, Entry& entry) {
    to.under_way.remove_if([&](const Send& message) {
      if (message.entry != &entry) return false;
      finish(message.number, kMismatch, peer, entry.expected);
      return true;
    });
  }

  void leave_window(Peer& to, int peer) {
    to.in_window = nullptr;
    if (!keep(to.kept, kWindow)) madvise(data_of(rank_) + peer * kWindow, kWindow, MADV_REMOVE);
  }

  // The first place in the stage that is large enough, if there is one.
  void take_place(Entry& entry) {
    const int64_t size = (entry.size + 63) / 64 * 64, begin = size_ * kWindow;
    int64_t cursor = begin;
    for (auto held = staged_.begin(); held != staged_.end();) {
      if ((*held)->state.load(std::memory_order_acquire) >= kReceived) {
        held = staged_.erase(held);
        continue;
      }
      if ((*held)->place - cursor >= size) break;
      cursor = (*held)->place + ((*held)->room + 63) / 64 * 64;
      ++held;
    }
    if (staged_.empty() && highest_ > 0) give_back();
    if (begin + stage_ - cursor < size) return;
    entry.place = cursor;
    entry.room = entry.size;
    highest_ = std::max(highest_, cursor + size);
    staged_.insert(std::find_if(staged_.begin(), staged_.end(), [&](auto* held) { return held->place > cursor; }),
                   &entry);
  }

  // Nothing is staged: give back the memory that is not to be kept.
  void give_back() {
    const int64_t used = (highest_ - size_ * kWindow + kPage - 1) / kPage * kPage;
    if (!keep(kept_, used)) madvise(data_of(rank_) + size_ * kWindow + kept_, used - kept_, MADV_REMOVE);
    highest_ = 0;
  }

  // Whether `bytes` may stay when messages are gone, of which `kept` are known to.
  static bool keep(int64_t& kept, int64_t bytes) {
    if (bytes > kept) {
      const int64_t room = std::max<int64_t>(0, kKept - kept_by_all.load()) / kPage * kPage;
      const int64_t more = std::min(bytes - kept, room);
      kept_by_all += more;
      kept += more;
    }
    return bytes <= kept;
  }

  // --- the receiving side -----------------------------------------------------------------------

  bool look_for_new(int peer) {
    if (peer == rank_) return false;
    Peer& from = peers_[static_cast<size_t>(peer)];
    Mailbox& box = mailbox(peer, rank_);
    const uint32_t sent = box.sent.load(std::memory_order_acquire);
    if (static_cast<uint32_t>(from.seen) == sent) return false;
    for (; static_cast<uint32_t>(from.seen) != sent; ++from.seen) {
      offer(peer, {from.seen, &box.entries[box.order[from.seen % kEntries]]});
    }
    return true;
  }

  // To the first receive that wants the message, or to later ones.
  void offer(int peer, const Arrived& message) {
    const auto receive = std::find_if(posted_.begin(), posted_.end(), [&](const Receive& each) {
      return (each.source == peer || each.source == kAny) && each.tag == message.entry->tag;
    });
    if (receive != posted_.end()) {
      const Receive found = *receive;
      posted_.erase(receive);
      match(found, peer, message);
      return;
    }
    auto& waiting = peers_[static_cast<size_t>(peer)].unmatched;
    auto later = waiting.end();  // a new one is the last
    while (later != waiting.begin() && std::prev(later)->place > message.place) --later;
    waiting.insert(later, message);
  }

  void match(Receive receive, int peer, const Arrived& message) {
    Entry* entry = message.entry;
    if (entry->size != receive.size) {
      entry->expected = receive.size;
      const int64_t length = entry->size;
      return_entry(peer, entry, kRefused);
      finish(receive.number, kMismatch, peer, length);
      return;
    }
    receive.source = peer;
    receive.entry = entry;
    receive.place = message.place;
    if (entry->written.load(std::memory_order_acquire) == 0 && entry->size > 0) {
      entry->state.store(kWanted, std::memory_order_release);
      ring(peer);
    }
    active_.push_back(receive);
    auto last = std::prev(active_.end());
    read(*last);
    if (last->position == last->size) end_of(last);
  }

  bool read(Receive& receive) {
    Entry& entry = *receive.entry;
    const int64_t written = entry.written.load(std::memory_order_acquire);
    bool any = false;
    while (receive.position < written) {
      const int64_t offset = receive.position % entry.room;
      const int64_t count = std::min({kPiece, written - receive.position, entry.room - offset});
      if (!receive.cancelled) {
        std::memcpy(receive.data + receive.position, data_of(receive.source) + entry.place + offset,
                    static_cast<size_t>(count));
      }
      receive.position += count;
      entry.read.store(receive.position, std::memory_order_release);
      if (entry.room != entry.size) ring(receive.source);
      any = true;
    }
    return any;
  }

  std::list<Receive>::iterator end_of(std::list<Receive>::iterator receive) {
    return_entry(receive->source, receive->entry, kReceived);
    finish(receive->number, receive->cancelled ? kCancelled : kArrived, receive->source, receive->size);
    return active_.erase(receive);
  }

  // From here on the entry is the sender's again, and its message's place from the state on.
  void return_entry(int peer, Entry* entry, State state) {
    Peer& from = peers_[static_cast<size_t>(peer)];
    Mailbox& box = mailbox(peer, rank_);
    entry->state.store(state, std::memory_order_release);
    box.freed[from.returned % kEntries] = static_cast<uint32_t>(entry - box.entries);
    box.returned.store(++from.returned, std::memory_order_release);
    ring(peer);
  }

  const int rank_, size_;
  const int64_t header_, stage_;
  std::vector<char*> memories_;
  std::vector<Peer> peers_;
  std::list<Entry*> staged_;    // whose data lies completely in the stage, in the order of places
  std::list<Receive> posted_;   // for which no message has come, in the order of the calls
  std::list<Receive> active_;   // which have a message
  std::unordered_set<int64_t> pending_;
  std::unordered_map<int64_t, Finished> finished_;
  int64_t kept_ = 0, highest_ = 0;
  int64_t calls_ = 0, calls_before_ = -1;  // in which others than progress_alone advance: so far, at its last call
  int waiting_ = 0;                        // threads
  std::mutex mutex_;
};

}  // namespace messages

void bind_messages(pybind11::module_& m) {
  using messages::Messages;
  pybind11::class_<Messages>(m, "Messages")
      .def(pybind11::init<int, const std::vector<int64_t>&, int64_t, int64_t>())
      .def_static("header_bytes", &Messages::header_bytes)
      .def_static("data_bytes", &Messages::data_bytes)
      .def("send", &Messages::send)
      .def("receive", &Messages::receive)
      .def("progress", &Messages::progress)
      .def("progress_alone", &Messages::progress_alone)
      .def("wait", &Messages::wait)
      .def("cancel", &Messages::cancel)
      .def("lose", &Messages::lose)
      .def("finished", &Messages::finished)
      .def("forget", &Messages::forget);
}

}  // namespace bmt

#else

void bmt::bind_messages(pybind11::module_&) {}

#endif
