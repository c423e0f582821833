// Package traceid carries the id that links the log lines that several processes write
// for one request: 32 hex digits, as in W3C's trace context.
//
// The id is only for logs. No decision depends on it, and it proves nothing about its
// sender.
package traceid

import (
	"context"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
)

// Header is the name of the HTTP header that carries an id, in requests and
// responses.
const Header = "X-Trace-Id"

// parentHeader is the name of W3C's header; the id is the second part of its value.
const parentHeader = "Traceparent"

const length = 32

// New makes an id.
func New() string { return ids.Hex(length / 2) }

// Parse reads an external id: 32 hex digits, or the same written as a UUID.
func Parse(s string) (id string, ok bool) {
	if len(s) == length+4 && s[8] == '-' && s[13] == '-' && s[18] == '-' && s[23] == '-' {
		s = s[:8] + s[9:13] + s[14:18] + s[19:23] + s[24:]
	}
	s = strings.ToLower(s)
	if len(s) != length || !ids.IsHex(s) || strings.Trim(s, "0") == "" {
		return "", false
	}
	return s, true
}

// FromParent extracts the id from W3C's VERSION-TRACE-PARENT-FLAGS.
func FromParent(s string) (id string, ok bool) {
	parts := strings.Split(s, "-")
	if len(s) > 512 || len(parts) < 4 || parts[0] == "00" && len(parts) != 4 {
		return "", false
	}
	version, id, parent, flags := parts[0], parts[1], parts[2], parts[3]
	if len(version) != 2 || version == "ff" || len(id) != length || len(parent) != length/2 || len(flags) != 2 ||
		strings.Trim(parent, "0") == "" || !ids.IsHex(version+id+parent+flags) {
		return "", false
	}
	return Parse(id)
}

// FromHeader returns the id that a request carries, or a new one; get reads a header.
func FromHeader(get func(name string) string) string {
	if id, ok := Parse(get(Header)); ok {
		return id
	}
	if id, ok := FromParent(get(parentHeader)); ok {
		return id
	}
	return New()
}

type key struct{}

// With returns ctx with an id; "" leaves ctx unchanged.
func With(ctx context.Context, id string) context.Context {
	if id == "" {
		return ctx
	}
	return context.WithValue(ctx, key{}, id)
}

// ID returns the id of ctx, or "".
func ID(ctx context.Context) string {
	id, _ := ctx.Value(key{}).(string)
	return id
}

// Variable is the environment variable that passes an id to child processes, in the
// format of W3C's header.
const Variable = "TRACEPARENT"

// Environ returns env with the id of ctx, for a new process.
func Environ(ctx context.Context, env []string) []string {
	id := ID(ctx)
	if id == "" {
		return env
	}
	return append(env, Variable+"=00-"+id+"-"+New()[:length/2]+"-01")
}
