//go:build linux && escape

package main

import (
	"fmt"
	"io"
	"net"
	"os"
	"regexp"
	"strconv"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/test/escape/plan"
)

// tokens matches tokens anywhere in a text.
var tokens = regexp.MustCompile(`tk[0-9]{3}[ws][0-9a-f]{8}`)

// listen runs in the second VM: it offers a service, and records every token that a
// frame brings to its card. It prints what it found.
func listen() error {
	l, err := net.Listen("tcp", ":"+strconv.Itoa(plan.GuestPort))
	if err != nil {
		return err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(time.Minute)) // a token is short
				b := make([]byte, 4096)
				n, _ := c.Read(b)
				fmt.Printf("service %s\n", tokens.Find(b[:n]))
				_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n"+os.Getenv("CANARY")+"\n") // an error means that the client is gone
			}()
		}
	}()
	fd, err := syscall.Socket(syscall.AF_PACKET, syscall.SOCK_RAW, int(htons(syscall.ETH_P_ALL)))
	if err != nil {
		return err
	}
	fmt.Println("listening")
	b := make([]byte, 65536)
	for {
		n, from, err := syscall.Recvfrom(fd, b, 0)
		if err != nil {
			return err
		}
		if ll, ok := from.(*syscall.SockaddrLinklayer); ok && ll.Pkttype == syscall.PACKET_OUTGOING {
			continue
		}
		if token := tokens.Find(b[:n]); token != nil {
			fmt.Printf("frame %s\n", token)
		}
	}
}
