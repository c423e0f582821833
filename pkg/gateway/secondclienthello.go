package gateway

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"slices"
)

// Constants of the TLS wire format.
const (
	recordHeader    = 5
	maxRecord       = 1<<14 + 2048 // of TLS 1.2, including the expansion by encryption
	changeCipher    = 20
	alert           = 21
	handshake       = 22
	applicationData = 23
	clientHelloType = 1
	serverHelloType = 2
	messageHeader   = 4
	randomAt        = messageHeader + 2
	randomEnd       = randomAt + 32
)

// helloRetryRequest is the random value of a ServerHello that asks for another
// ClientHello (RFC 8446, 4.1.3).
var helloRetryRequest = []byte("\xcf\x21\xad\x74\xe5\x9a\x61\x11\xbe\x1d\x8c\x02\x1e\x65\xb8\x91\xc2\xa2\x11\x16\x7a\xbb\x8c\x5e\x07\x9e\x09\xe2\xc8\xa8\x33\x9c")

var errAfterHello = errors.New("not a TLS ClientHello: extra data in its record")

// helloEnd returns the offset at which the records of the ClientHello at the start of b
// end. It refuses a record that holds more than the hello, because the rest could be
// another ClientHello that no check sees.
func helloEnd(b []byte) (int, error) {
	var message []byte
	for at := 0; len(b)-at >= recordHeader; {
		kind, end := b[at], at+recordHeader+int(binary.BigEndian.Uint16(b[at+3:]))
		if end > len(b) {
			break
		}
		if kind == handshake {
			message = append(message, b[at+recordHeader:end]...)
		}
		if size, ok := messageSize(message); ok && len(message) >= size {
			if len(message) > size {
				return 0, errAfterHello
			}
			return end, nil
		}
		at = end
	}
	return 0, io.ErrUnexpectedEOF
}

// messageSize returns the size of the handshake message that b starts with.
func messageSize(b []byte) (int, bool) {
	if len(b) < messageHeader {
		return 0, false
	}
	return messageHeader + int(b[1])<<16 + int(binary.BigEndian.Uint16(b[2:])), true
}

// readRecord reads one TLS record and nothing after it. If the input is not TLS, it
// reads only the first bytes. The returned bytes are valid even with an error.
func readRecord(r io.Reader) (record []byte, isTLS bool, err error) {
	record = make([]byte, recordHeader)
	n, err := io.ReadFull(r, record)
	size := int(binary.BigEndian.Uint16(record[3:]))
	if err != nil || record[0] < changeCipher || record[0] > applicationData || size > maxRecord {
		return record[:n], false, err
	}
	record = append(record, make([]byte, size)...)
	n, err = io.ReadFull(r, record[recordHeader:])
	return record[:recordHeader+n], err == nil, err
}

// passServerHello passes on the server's messages until it is known whether the server
// asks for another ClientHello. None of the guest's bytes are passed on before.
func passServerHello(to io.Writer, from io.Reader) (retry bool, err error) {
	var message []byte
	for {
		record, isTLS, err := readRecord(from)
		if _, err := to.Write(record); err != nil {
			return false, err
		}
		if !isTLS {
			if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
				err = nil // reported again by the next read
			}
			return false, err
		}
		switch record[0] {
		case applicationData:
			return false, nil
		case handshake:
			message = append(message, record[recordHeader:]...)
		}
		size, ok := messageSize(message)
		if ok && message[0] != serverHelloType || len(message) >= randomEnd && !bytes.Equal(message[randomAt:randomEnd], helloRetryRequest) {
			return false, nil
		}
		if ok && len(message) >= size {
			return len(message) >= randomEnd, nil
		}
		if len(message) > maxClientHello {
			return false, errors.New("the server's hello is too long")
		}
	}
}

// secondHelloReader reads what a guest sends over TLS after its first ClientHello. It accepts
// a second ClientHello only if the server asked for one and it carries the same name.
type secondHelloReader struct {
	*guestEnd
	name    string
	rest    []byte // already read from the guest
	passed  []byte // checked, but not returned yet
	retry   bool   // the server asks for another ClientHello
	checked bool   // from here on the guest may send anything
}

func (a *secondHelloReader) Read(b []byte) (int, error) {
	for len(a.passed) == 0 && !a.checked {
		if err := a.next(); err != nil {
			return 0, err
		}
	}
	if len(a.passed) > 0 {
		n := copy(b, a.passed)
		a.passed = a.passed[n:]
		return n, nil
	}
	return a.guestEnd.Read(b)
}

// next checks one record.
func (a *secondHelloReader) next() error {
	from := &replayed{Conn: a.guestEnd, first: bytes.NewReader(a.rest)}
	record, isTLS, err := readRecord(from)
	a.rest = a.rest[min(len(record), len(a.rest)):]
	switch {
	case err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF):
		return err
	case err == nil && isTLS && (record[0] == alert || len(record) == recordHeader), a.retry && isTLS && record[0] != handshake:
		a.passed = record // records that a server skips, such as early data that it refused
		return nil
	case isTLS && record[0] == handshake && record[recordHeader] == clientHelloType, a.retry && err == nil:
		return a.second(record)
	}
	a.passed, a.rest, a.checked = slices.Concat(record, a.rest), nil, true
	return nil
}

// second checks another ClientHello.
func (a *secondHelloReader) second(record []byte) error {
	no := func(err error) error {
		return &deniedError{decision{Reason: "a second ClientHello: " + err.Error()}, a.c.to.Addr()}
	}
	if !a.retry {
		return no(errors.New("the server did not request it"))
	}
	h, err := readClientHello(a.c.ctx, a.guestEnd, slices.Concat(record, a.rest))
	if err == nil {
		err = h.check(a.name)
	}
	if err != nil {
		return no(err)
	}
	a.passed, a.rest, a.checked = slices.Concat(h.bytes, h.rest), nil, true
	return nil
}
