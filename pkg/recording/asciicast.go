package recording

import (
	"bytes"
	"encoding/json"
	"strconv"
	"time"
)

// header is the first line of an asciicast v2 file.
type header struct {
	Version   int    `json:"version"`
	Width     int    `json:"width"`
	Height    int    `json:"height"`
	Timestamp int64  `json:"timestamp"` // seconds; the times of the events count from here
	Title     string `json:"title,omitempty"`
}

// The kinds of events.
const (
	Output = "o"
	Resize = "r" // the data is WIDTHxHEIGHT
)

// Event is something that happened on a terminal.
type Event struct {
	At   time.Duration // since the recording began
	Kind string
	Data string
}

// appendEvent appends the line of an event.
func appendEvent(line []byte, e Event) []byte {
	line = append(line, '[')
	line = strconv.AppendFloat(line, e.At.Seconds(), 'f', 3, 64)
	line = append(line, `, "`...)
	line = append(line, e.Kind...)
	line = append(line, `", `...)
	return append(append(line, quote(e.Data)...), "]\n"...)
}

// quote returns a text as JSON, and leaves < and the like as they are.
func quote(s string) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(s) // a string always has a JSON form
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

// parseEvent reads the line of an event.
func parseEvent(line []byte) (e Event, ok bool) {
	var fields [3]json.RawMessage
	var at float64
	if json.Unmarshal(line, &fields) != nil || json.Unmarshal(fields[0], &at) != nil || json.Unmarshal(fields[1], &e.Kind) != nil || json.Unmarshal(fields[2], &e.Data) != nil {
		return e, false
	}
	if at < 0 || at > maxPartTime.Seconds() || e.Kind != Output && e.Kind != Resize {
		return e, false
	}
	e.At = time.Duration(at * float64(time.Second))
	return e, true
}

// maxPartTime limits the times in a part, which a clock that is set may spoil.
const maxPartTime = 10 * 365 * 24 * time.Hour
