package policy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// MaxBytes is the maximum size of a policy's compiled form.
const MaxBytes = 16 << 20

// Marshal returns p's compiled form. It refuses an invalid policy.
func Marshal(p *Policy) ([]byte, error) {
	if p == nil {
		return nil, errors.New("encode policy: the policy is nil")
	}
	if err := p.Validate(); err != nil {
		return nil, fmt.Errorf("encode policy: %w", err)
	}
	data, err := json.Marshal(p)
	if err != nil {
		return nil, fmt.Errorf("encode policy: %w", err)
	}
	if len(data) > MaxBytes {
		return nil, fmt.Errorf("encode policy: larger than %d bytes", MaxBytes)
	}
	return data, nil
}

// Unmarshal reads a compiled policy. It returns an error for unknown fields, trailing
// data and anything that Validate refuses, so that a policy is never applied in part.
func Unmarshal(data []byte) (*Policy, error) {
	if len(data) > MaxBytes {
		return nil, fmt.Errorf("decode policy: larger than %d bytes", MaxBytes)
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	p := &Policy{}
	if err := d.Decode(p); err != nil {
		return nil, fmt.Errorf("decode policy: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("decode policy: more than one value")
	}
	if err := p.Validate(); err != nil {
		return nil, fmt.Errorf("decode policy: %w", err)
	}
	return p, nil
}
