// Package gopacket stands in for the library of that name, in go.mod.
//
// Our dependencies use it only to print packets, in a debug mode
// that nothing here turns on. For that the real one fills seven megabytes of
// tables before main, in every process: each command, and three that run for as
// long as a session does.
package gopacket

import "encoding/hex"

// LayerType and DecodeOptions only have to be passed to NewPacket.
type (
	LayerType     struct{}
	DecodeOptions struct{}
)

// Default options.
var Default DecodeOptions

// Packet is a packet that can be printed.
type Packet []byte

// NewPacket returns the bytes as a Packet.
func NewPacket(data []byte, _ LayerType, _ DecodeOptions) Packet { return data }

func (p Packet) String() string { return hex.Dump(p) }
