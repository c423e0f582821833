package store

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// MaxGuestEvents limits how many bytes of events a guest may add to one session or
// task in total, over all connections and keepers.
const MaxGuestEvents = 64 << 20

// eventOverhead is the size of an event in the store besides its kind and its data.
const eventOverhead = 64

// Budget counts what a guest has added to the events of one session or task. It is
// stored in the status of the row, and changes in the transaction that stores the
// events.
type Budget struct {
	Bytes   int64 `json:"bytes,omitempty"`   // of the guest's events in the store
	Dropped int64 `json:"dropped,omitempty"` // events that were counted and not stored
}

// Admit returns those of a guest's events that may be stored, and counts all of them.
// Once one event does not fit, no later event is stored. The first dropped event is
// replaced by a warning that says so; the others are only counted.
func (b *Budget) Admit(evs ...Event) []Event {
	var admitted []Event
	for _, ev := range evs {
		size := int64(len(ev.Kind) + len(ev.Data) + eventOverhead)
		if b.Dropped == 0 && size <= MaxGuestEvents-b.Bytes {
			b.Bytes += size
			admitted = append(admitted, ev)
			continue
		}
		if b.Dropped++; b.Dropped == 1 {
			admitted = append(admitted, budgetSpent)
		}
	}
	return admitted
}

// budgetSpent is the last event that a guest causes. Its data has the form of a
// warning of sessions and tasks.
var budgetSpent = NewEvent("warning", map[string]string{
	"message": fmt.Sprintf("the guest has added %d MiB of events, which is the limit; further events are only counted", MaxGuestEvents>>20),
})

// NewEvent makes an event. data must be of a type that can be encoded as JSON. It
// does not escape < and &, so a text takes no more space than it needs.
func NewEvent(kind string, data any) Event {
	raw, err := marshal(data)
	if err != nil {
		panic(fmt.Sprintf("store: event %s cannot be JSON: %v", kind, err)) // the types of events can always be encoded
	}
	return Event{Kind: kind, Data: raw}
}

// marshal works like json.Marshal without escaping for HTML, which turns one byte
// into six.
func marshal(data any) (json.RawMessage, error) {
	var text bytes.Buffer
	enc := json.NewEncoder(&text)
	enc.SetEscapeHTML(false)
	err := enc.Encode(data)
	return bytes.TrimSuffix(text.Bytes(), []byte("\n")), err
}
