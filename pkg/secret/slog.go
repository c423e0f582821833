package secret

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
)

// Handler returns a handler that redacts the message and the attributes of every
// record before h receives it.
func (r *Redactor) Handler(h slog.Handler) slog.Handler { return handler{r, h} }

type handler struct {
	r    *Redactor
	next slog.Handler
}

func (h handler) Enabled(ctx context.Context, l slog.Level) bool { return h.next.Enabled(ctx, l) }
func (h handler) WithGroup(name string) slog.Handler             { return handler{h.r, h.next.WithGroup(name)} }

func (h handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return handler{h.r, h.next.WithAttrs(h.attrs(attrs))}
}

func (h handler) Handle(ctx context.Context, rec slog.Record) error {
	out := slog.NewRecord(rec.Time, rec.Level, h.r.Redact(rec.Message), rec.PC)
	rec.Attrs(func(a slog.Attr) bool {
		out.AddAttrs(h.attr(a))
		return true
	})
	return h.next.Handle(ctx, out)
}

func (h handler) attrs(in []slog.Attr) []slog.Attr {
	out := make([]slog.Attr, len(in))
	for i, a := range in {
		out[i] = h.attr(a)
	}
	return out
}

func (h handler) attr(a slog.Attr) slog.Attr {
	v := a.Value.Resolve()
	switch v.Kind() {
	case slog.KindString:
		v = slog.StringValue(h.r.Redact(v.String()))
	case slog.KindGroup:
		v = slog.GroupValue(h.attrs(v.Group())...)
	case slog.KindAny:
		v = h.any(v)
	}
	return slog.Attr{Key: a.Key, Value: v}
}

// any returns an error or a struct unchanged unless its text or its JSON, which
// follows pointers, contains a secret.
func (h handler) any(v slog.Value) slog.Value {
	texts := []string{fmt.Sprintf("%+v", v.Any())}
	if b, ok := v.Any().([]byte); ok {
		texts = append(texts, string(b))
	} else if b, err := json.Marshal(v.Any()); err == nil {
		texts = append(texts, string(b))
	}
	for _, s := range texts {
		if clean := h.r.Redact(s); clean != s {
			return slog.StringValue(clean)
		}
	}
	return v
}
