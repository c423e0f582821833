// Package layers names the one layer that is asked for; see gopacket.
package layers

import "github.com/google/gopacket"

// LayerTypeEthernet is where a packet of an Ethernet begins.
var LayerTypeEthernet gopacket.LayerType
