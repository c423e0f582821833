// Package observe replaces the library of that name, in go.mod.
//
// The runtime of 1Password's WebAssembly core can trace calls with it if its caller
// passes an adapter, which 1Password's SDK never does. The real one links a parser of
// WebAssembly, a demangler of C++ and Rust names, and OpenTelemetry's messages.
package observe

import (
	"context"
	"errors"

	"github.com/tetratelabs/wazero"
)

// AdapterBase would send traces.
type AdapterBase struct{}

// Options would select what is traced.
type Options struct{}

// TraceCtx would be the trace of one call.
type TraceCtx struct{}

// NewTraceCtx returns an error, because this package traces nothing.
func (*AdapterBase) NewTraceCtx(context.Context, wazero.Runtime, []byte, *Options) (*TraceCtx, error) {
	return nil, errors.ErrUnsupported
}

// Finish does nothing.
func (*TraceCtx) Finish() {}
