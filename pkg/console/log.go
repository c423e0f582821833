package console

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/traceid"
)

// LevelTrace is below the levels that slog defines.
const LevelTrace = slog.LevelDebug - 4

var levels = []struct {
	level slog.Level
	name  string
}{
	{LevelTrace, "trace"},
	{slog.LevelDebug, "debug"},
	{slog.LevelInfo, "info"},
	{slog.LevelWarn, "warn"},
	{slog.LevelError, "error"},
}

// ParseLevel returns the level of that name.
func ParseLevel(name string) (slog.Level, bool) {
	for _, l := range levels {
		if l.name == name {
			return l.level, true
		}
	}
	return 0, false
}

func levelName(level slog.Level) string {
	for _, l := range slices.Backward(levels) {
		if level >= l.level {
			return l.name
		}
	}
	return levels[0].name
}

// Format is the layout of a log record.
type Format string

// The formats. All write one line per record.
const (
	FormatPretty  Format = "pretty"  // for people
	FormatJSON    Format = "json"    // an object: timestamp, level, trace_id, task_id, session, message, then the other attributes
	FormatCompact Format = "compact" // for people with narrow terminals
)

// Redactor removes secrets from a log.
type Redactor interface {
	Handler(slog.Handler) slog.Handler
	Redact(string) string
}

// Log configures a log. The zero Log writes level info and above to stderr in the pretty
// format.
type Log struct {
	Level  slog.Level
	Format Format
	To     io.Writer // each record is one Write; nil is stderr
	Redact Redactor  // may be nil
}

// Logger returns a logger that removes secrets and cleans all text. Each record carries the
// trace id of its context.
func (c *Console) Logger(l Log) *slog.Logger {
	h := &logHandler{Log: l, mu: &sync.Mutex{}}
	if h.To == nil {
		h.To, h.color = c.Err, c.color.err
	}
	if l.Redact == nil {
		return slog.New(h)
	}
	return slog.New(l.Redact.Handler(h))
}

// Bounds of one record. They limit how much of a guest's text reaches the log.
const (
	maxLogKey    = 64       // bytes
	maxLogText   = 4 << 10  // bytes of one text
	maxLogValue  = 16 << 10 // bytes, as JSON, of one composite value
	maxLogRecord = 64 << 10
	maxLogDepth  = 8
)

// logHandler writes records. The keys of grouped attributes are prefixed with the names of
// their groups.
type logHandler struct {
	Log
	color bool

	mu    *sync.Mutex // guards To, for this handler and those derived from it
	attrs []grouped   // unprocessed, because a secret in them may become known later
	group string      // the names of the open groups, each followed by a dot
}

type grouped struct {
	group string
	slog.Attr
}

func (h *logHandler) Enabled(_ context.Context, level slog.Level) bool { return level >= h.Level }

func (h *logHandler) WithGroup(name string) slog.Handler {
	if name == "" {
		return h
	}
	with := *h
	with.group += name + "."
	return &with
}

func (h *logHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	with := *h
	with.attrs = slices.Clip(with.attrs)
	for _, a := range attrs {
		with.attrs = append(with.attrs, grouped{h.group, a})
	}
	return &with
}

func (h *logHandler) Handle(ctx context.Context, r slog.Record) error {
	f := fields{h: h}
	for _, a := range h.attrs {
		f.add(a.group, a.Attr)
	}
	r.Attrs(func(a slog.Attr) bool {
		f.add(h.group, a)
		return true
	})
	if id := traceid.ID(ctx); id != "" && f.get(traceKey) == nil {
		f.set(traceKey, id)
	}
	var line []byte
	switch h.Format {
	case FormatJSON:
		line = f.json(r)
	case FormatCompact:
		line = f.text(r, time.TimeOnly, levelName(r.Level)[:1])
	default:
		line = f.text(r, "2006-01-02 15:04:05.000", fmt.Sprintf("%-5s", levelName(r.Level)))
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	_, err := h.To.Write(append(line, '\n'))
	return err
}

// clean returns s as one harmless line without secrets. The handlers in front of this one
// have already redacted s, but removing control characters may have reassembled a secret.
func (h *logHandler) clean(s string) string {
	s = termtext.Line(termtext.Head(s, 16*maxLogText)) // the head bounds the time that Line takes
	if h.Redact != nil {
		s = h.Redact.Redact(s)
	}
	return termtext.Brief(s, maxLogText)
}

// fields holds the attributes of a record in order. Each key appears once, with its last
// value.
type fields struct {
	h   *logHandler
	all []field
}

type field struct {
	key   string
	value any // encodable as JSON
}

func (f *fields) get(key string) any {
	for _, x := range f.all {
		if x.key == key {
			return x.value
		}
	}
	return nil
}

func (f *fields) set(key string, value any) {
	for i := range f.all {
		if f.all[i].key == key {
			f.all[i].value = value
			return
		}
	}
	f.all = append(f.all, field{key, value})
}

func (f *fields) add(group string, a slog.Attr) {
	v := a.Value.Resolve()
	if v.Kind() == slog.KindGroup {
		if a.Key != "" {
			group += a.Key + "."
		}
		for _, inner := range v.Group() {
			f.add(group, inner)
		}
		return
	}
	if a.Equal(slog.Attr{}) {
		return // the slog.Handler contract ignores empty attributes
	}
	f.set(logKey(group+a.Key), f.h.plain(v))
}

// The record's own keys, and the keys that are written first.
const (
	timeKey    = "timestamp"
	levelKey   = "level"
	messageKey = "message"
	traceKey   = "trace_id"
)

var firstKeys = []string{traceKey, "task_id", "session"}

// logKey returns key in snake case, changed if it would collide with one of the record's
// own.
func logKey(key string) string {
	key = strings.Map(func(r rune) rune {
		switch {
		case 'A' <= r && r <= 'Z':
			return r - 'A' + 'a'
		case 'a' <= r && r <= 'z', '0' <= r && r <= '9', r == '.':
			return r
		}
		return '_'
	}, key[:min(len(key), maxLogKey)])
	if key == timeKey || key == levelKey || key == messageKey {
		key += "_"
	}
	return key
}

func stamp(t time.Time) string { return t.UTC().Format("2006-01-02T15:04:05.000Z07:00") }

// plain converts v to a value that JSON can encode, with its text cleaned.
func (h *logHandler) plain(v slog.Value) (plain any) {
	defer func() {
		if r := recover(); r != nil { // e.g. a method called on a nil pointer
			plain = h.clean(fmt.Sprintf("!PANIC: %v", r))
		}
	}()
	switch v.Kind() {
	case slog.KindBool, slog.KindInt64, slog.KindUint64:
		return v.Any()
	case slog.KindFloat64:
		if x := v.Float64(); !math.IsNaN(x) && !math.IsInf(x, 0) {
			return x
		}
		return v.String()
	case slog.KindDuration:
		return v.Duration().String()
	case slog.KindTime:
		return stamp(v.Time())
	case slog.KindString:
		return h.clean(v.String())
	}
	switch x := v.Any().(type) {
	case nil:
		return nil
	case error:
		return h.clean(x.Error())
	case []byte:
		return h.clean(string(x))
	}
	raw, err := json.Marshal(v.Any())
	if err != nil {
		return h.clean(fmt.Sprintf("%+v", v.Any()))
	}
	if len(raw) > maxLogValue {
		return h.clean(string(raw))
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	var x any
	if err := d.Decode(&x); err != nil {
		return h.clean(string(raw))
	}
	return h.cleanAll(x, 0)
}

// cleanAll applies clean to all text in a decoded JSON value.
func (h *logHandler) cleanAll(x any, depth int) any {
	if depth > maxLogDepth {
		return "…"
	}
	switch x := x.(type) {
	case string:
		return h.clean(x)
	case []any:
		for i := range x {
			x[i] = h.cleanAll(x[i], depth+1)
		}
	case map[string]any:
		clean := make(map[string]any, len(x))
		for k, v := range x {
			clean[h.clean(k)] = h.cleanAll(v, depth+1)
		}
		return clean
	}
	return x
}

func (f *fields) json(r slog.Record) []byte {
	b := append([]byte{'{'}, `"timestamp":`...)
	b = appendJSON(b, stamp(r.Time))
	b = appendJSON(append(b, `,"level":`...), levelName(r.Level))
	member := func(key string, value any) {
		b = append(appendJSON(append(b, ','), key), ':')
		b = appendJSON(b, value)
	}
	for _, key := range firstKeys {
		if v := f.get(key); v != nil {
			member(key, v)
		}
	}
	member(messageKey, f.h.clean(r.Message))
	for _, x := range f.all {
		if slices.Contains(firstKeys, x.key) {
			continue
		}
		if len(b) > maxLogRecord-2*maxLogValue {
			member("truncated", true)
			break
		}
		member(x.key, x.value)
	}
	return append(b, '}')
}

// appendJSON appends v, which JSON can encode, on one line and without HTML escapes.
func appendJSON(b []byte, v any) []byte {
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil { // cannot happen
		return strconv.AppendQuote(b, err.Error())
	}
	return append(b, bytes.TrimSuffix(out.Bytes(), []byte("\n"))...)
}

// text formats a record for people, in local time. The trace id comes last, and not at all
// in the compact format, because it is long and tells people nothing.
func (f *fields) text(r slog.Record, layout, level string) []byte {
	tones := map[string]Tone{"warn": Notice, "error": Bad, "trace": Faint, "debug": Faint}
	b := []byte(paint(f.h.color, Faint, r.Time.Local().Format(layout)) + " " +
		paint(f.h.color, tones[levelName(r.Level)], level) + " " + f.h.clean(r.Message))
	pair := func(x field) {
		b = append(b, ' ')
		b = append(b, paint(f.h.color, Faint, x.key+"=")...)
		b = append(b, plainText(x.value)...)
	}
	for _, x := range f.all {
		if x.key == traceKey {
			continue
		}
		if len(b) > maxLogRecord-2*maxLogValue {
			b = append(b, " …"...)
			break
		}
		pair(x)
	}
	if id := f.get(traceKey); id != nil && f.h.Format != FormatCompact {
		pair(field{traceKey, id})
	}
	return b
}

// plainText formats a value so that it cannot be mistaken for another part of its line.
func plainText(v any) string {
	s, ok := v.(string)
	if !ok {
		return string(appendJSON(nil, v))
	}
	if s == "" || strings.ContainsAny(s, " \"=") {
		return strconv.Quote(s)
	}
	return s
}
